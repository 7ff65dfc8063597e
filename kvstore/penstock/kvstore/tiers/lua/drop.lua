-- Remove KV blocks from the index. The caller has deleted the blocks before, or never wrote them.
--
-- ARGV     budget, keep, t, then keys. t = 0 also removes leased blocks. Otherwise t is a time of the index's clock,
--          and blocks stay that are leased or were used since then.
--
-- Replies  the number of removed blocks
--
-- Crash    before: the first process that misses the blocks removes their entries.

local count, clock_then = 0, tonumber(ARGV[3])
for i = 4, #ARGV do
  local score = redis.call('ZSCORE', USED, ARGV[i])
  if clock_then == 0 or score and tonumber(score) <= clock_then then count = count + drop(ARGV[i]) end
end
save()
return count
