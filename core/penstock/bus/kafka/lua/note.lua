-- Note how far partitions are finished, see `penstock.bus.kafka.places`. Within a topic a note never goes back: a member
-- may write late what it committed before it lost a partition. Messages that another topic of this name still had are
-- counted as lost.
--
-- KEYS[1]  finished  hash; the note of each partition: id of its topic, committed offset, how many messages behind that
--                    are not finished, finished ranges
-- KEYS[2]  lost      hash; how many messages of each topic were lost
-- ARGV     how many seconds `lost` is kept, then for each partition: its name, its topic, the four words of its note
--
-- Replies  for each partition how many messages were lost

local lost = {}
for i = 2, #ARGV, 6 do
  local known = redis.call('HGET', KEYS[1], ARGV[i]) or ''
  local id, offset, left = string.match(known, '^(%S+) (%d+) (%d+)')
  local is_anew = id and id ~= ARGV[i + 2]
  table.insert(lost, is_anew and tonumber(left) or 0)
  if is_anew and tonumber(left) > 0 then
    redis.call('HINCRBY', KEYS[2], ARGV[i + 1], left)
    redis.call('EXPIRE', KEYS[2], ARGV[1])
  end
  if id ~= ARGV[i + 2] or tonumber(offset) <= tonumber(ARGV[i + 3]) then
    redis.call('HSET', KEYS[1], ARGV[i], table.concat(ARGV, ' ', i + 2, i + 5))
  end
end
return lost
