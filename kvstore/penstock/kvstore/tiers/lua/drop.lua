-- Remove blocks from the index. The caller has deleted them before, or has not written them.
--
-- ARGV     budget, keep, t, then keys. t = 0: also leased blocks. Else t is a time of the index's clock, and blocks that
--          are leased or were used since then stay.
--
-- Replies  how many were in the index
--
-- Crash    before: the entries are removed by the first process that does not find their blocks.

local count, clock_then = 0, tonumber(ARGV[3])
for i = 4, #ARGV do
  local score = redis.call('ZSCORE', USED, ARGV[i])
  if clock_then == 0 or score and tonumber(score) <= clock_then then count = count + drop(ARGV[i]) end
end
save()
return count
