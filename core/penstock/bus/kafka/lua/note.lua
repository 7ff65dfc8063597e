-- Note how far partitions are finished, see `penstock.bus.kafka.places`. The offset in a partition's note never
-- decreases while its topic is the same: a member may write a late note for a partition that it lost. A topic that was
-- deleted and created again has another id. The unfinished messages of the deleted topic are counted as lost.
--
-- KEYS[1]  finished  hash; the note of each partition: topic id, committed offset, number of unfinished messages from
--                    that offset on, finished ranges
-- KEYS[2]  lost      hash; number of lost messages by topic
-- ARGV     ttl of `lost` in s, then for each partition: its name, its topic, the four words of its note
--
-- Replies  the number of lost messages of each partition

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
