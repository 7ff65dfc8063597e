-- Find out how many entries are gone that no member has finished: somebody trimmed or deleted a stream. They are told once.
--
-- KEYS[1]  finished  hash; by topic how many of its entries are gone as they were finished, or were told to be lost, and
--                    by `<topic>:added` how many it ever had when it was looked at last
-- KEYS[2]  lost      hash; how many entries of each topic were lost
-- KEYS[3…]           the streams
-- ARGV     how many seconds `lost` is kept, then the topic of each stream
--
-- Replies  for each stream how many were lost since. A stream that has had fewer entries than before was made anew: all
--          are lost that the other one still had when it was looked at

local found = {}
for i = 3, #KEYS do
  local topic, info = ARGV[i - 1], {['entries-added'] = 0, length = 0}
  if redis.call('EXISTS', KEYS[i]) == 1 then
    local flat = redis.call('XINFO', 'STREAM', KEYS[i])
    for j = 1, #flat, 2 do info[flat[j]] = flat[j + 1] end
  end
  local known = redis.call('HMGET', KEYS[1], topic, topic .. ':added')
  local added, gone, before = info['entries-added'], info['entries-added'] - info.length, tonumber(known[2] or 0)
  local finished = tonumber(known[1] or gone)
  if added < before or gone < finished then finished = gone + finished - before end
  local lost = math.max(0, gone - finished)
  table.insert(found, lost)
  redis.call('HSET', KEYS[1], topic, gone, topic .. ':added', added)
  if lost > 0 then
    redis.call('HINCRBY', KEYS[2], topic, lost)
    redis.call('EXPIRE', KEYS[2], ARGV[1])
  end
end
return found
