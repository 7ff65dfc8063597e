-- Note how far partitions are finished, see `penstock.bus.kafka.places`. Within a topic a note never goes back: a member
-- may write late what it committed before it lost a partition.
--
-- KEYS[1]  finished  hash; the note of each partition: id of its topic, committed offset, end of the log, finished ranges
-- ARGV     for each partition: its name, then the four words of its note
--
-- Replies  for each partition: the note that was replaced if it was of another topic with this name, else ''

local replaced = {}
for i = 1, #ARGV, 5 do
  local known = redis.call('HGET', KEYS[1], ARGV[i]) or ''
  local id, offset = string.match(known, '^(%S+) (%d+)')
  table.insert(replaced, id and id ~= ARGV[i + 1] and known or '')
  if id ~= ARGV[i + 1] or tonumber(offset) <= tonumber(ARGV[i + 2]) then
    redis.call('HSET', KEYS[1], ARGV[i], table.concat(ARGV, ' ', i + 1, i + 4))
  end
end
return replaced
