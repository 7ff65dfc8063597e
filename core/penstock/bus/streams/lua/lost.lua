-- Count entries that disappeared before a member finished them: somebody trimmed or deleted a stream. Each entry is
-- counted once.
--
-- KEYS[1]  finished  hash; by topic: number of its entries that were finished or counted as lost; by `<topic>:added`:
--                    number of entries that it ever had
-- KEYS[2]  lost      hash; number of lost entries by topic
-- KEYS[3…]           the streams
-- ARGV     ttl of `lost` in s, then the topic of each stream
--
-- Replies  the number of lost entries of each stream. A stream with fewer added entries than before was deleted and
--          created again: all entries that the deleted stream still had at the last call are lost

local found = {}
for i = 3, #KEYS do
  local topic, info = ARGV[i - 1], {['entries-added'] = 0, length = 0}
  local flat = redis.call('EXISTS', KEYS[i]) == 1 and redis.call('XINFO', 'STREAM', KEYS[i]) or {}
  for j = 1, #flat, 2 do info[flat[j]] = flat[j + 1] end
  local known = redis.call('HMGET', KEYS[1], topic, topic .. ':added')
  local added, gone, before = info['entries-added'], info['entries-added'] - info.length, tonumber(known[2] or 0)
  local finished = tonumber(known[1] or gone)
  if added < before or gone < finished then finished = gone + finished - before end
  table.insert(found, math.max(0, gone - finished))
  redis.call('HSET', KEYS[1], topic, gone, topic .. ':added', added)
  if gone > finished then
    redis.call('HINCRBY', KEYS[2], topic, gone - finished)
    redis.call('EXPIRE', KEYS[2], ARGV[1])
  end
end
return found
