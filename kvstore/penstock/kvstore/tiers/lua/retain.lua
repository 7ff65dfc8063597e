-- Let those blocks that are in the index count as used at a later time, the first of them last.
--
-- ARGV     budget, keep, retention in ms, then keys. 0 ms: they count as used now.
--
-- Replies  {1 in the index or 0 not, …}
--
-- Crash    after: the retentions end.

local found, ms, from = {}, tonumber(ARGV[3]), clock
for i = 4, #ARGV do
  local set = redis.call('ZSCORE', USED, ARGV[i]) and USED or redis.call('ZSCORE', HELD, ARGV[i]) and HELD
  if set and ms > 0 then redis.call('ZADD', set, 'XX', 'GT', from + ms * 1000 - i, ARGV[i]) end
  if set and ms == 0 then redis.call('ZADD', set, 'XX', tick(), ARGV[i]) end
  found[#found + 1] = set and 1 or 0
end
save()
return found
