-- Find out how many unfinished entries are gone, as somebody trimmed or deleted a stream. Each is told once.
--
-- KEYS[1]  finished  hash; by topic how many of its entries were finished or told to be lost, by `<topic>:added` how many
--                    it ever had
-- KEYS[2]  lost      hash; how many entries of each topic were lost
-- KEYS[3…]           the streams
-- ARGV     how many seconds `lost` is kept, then the topic of each stream
--
-- Replies  for each stream how many were lost. One that has had fewer entries than before was made anew, and lost all that
--          the other one still had when it was looked at

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
