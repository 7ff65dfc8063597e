-- Blocks are out of the index. The caller has deleted them before, or has not written them.
--
-- ARGV     budget, keep, 0: leased or not, else a time of the index's clock: if not leased or used since; then keys
--
-- Replies  how many were in the index
--
-- Crash    before: the entries are forgotten by the first who does not find their blocks.

local count, clock_then = 0, tonumber(ARGV[3])
for i = 4, #ARGV do
  local score = redis.call('ZSCORE', USED, ARGV[i])
  if clock_then == 0 or score and tonumber(score) <= clock_then then count = count + drop(ARGV[i]) end
end
save()
return count
