-- Give a worker new messages, of the groups that it is in: of each class no more than there is room for.
--
-- KEYS     the streams, those first whose messages come first
-- ARGV     how many messages of the first class, how many of the second, then for each stream: group, own consumer, class
--          (1 or 2)
--
-- Replies  for each stream the entries that are the consumer's now

local room = {tonumber(ARGV[1]), tonumber(ARGV[2])}
local found = {}
for i, stream in ipairs(KEYS) do
  local group, me, class = ARGV[3 * i], ARGV[3 * i + 1], tonumber(ARGV[3 * i + 2])
  found[i] = {}
  if room[class] > 0 then
    local reply = redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', room[class], 'STREAMS', stream, '>')
    if reply then
      found[i] = reply[1][2]
      room[class] = room[class] - #found[i]
    end
  end
end
return found
