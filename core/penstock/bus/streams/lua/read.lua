-- Give a worker new messages of the groups that it is in: of each class no more than it has room for. If it gets all
-- messages, reply behind which entries it may wait for the next ones.
--
-- KEYS     the streams, those first whose messages come first
-- ARGV     how many messages of the first class, how many of the second, then for each stream: group, own consumer, class
--          (1 or 2)
--
-- Replies  for each stream the entries that are the consumer's now; for each stream the last entry that its group has
--          delivered, or an empty text where more is behind it; empty for all where there were entries and are more

local room = {tonumber(ARGV[1]), tonumber(ARGV[2])}
local found, after, total = {}, {}, 0
for i, stream in ipairs(KEYS) do
  local group, me, class = ARGV[3 * i], ARGV[3 * i + 1], tonumber(ARGV[3 * i + 2])
  found[i], after[i] = {}, ''
  if room[class] > 0 then
    local reply = redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', room[class], 'STREAMS', stream, '>')
    if reply then
      found[i] = reply[1][2]
      room[class] = room[class] - #found[i]
      total = total + #found[i]
    end
  end
end
for i, stream in ipairs(KEYS) do
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = {}
    for j = 1, #flat, 2 do info[flat[j]] = flat[j + 1] end
    local last = info['last-delivered-id']
    if info.name == ARGV[3 * i] and not redis.call('XREAD', 'COUNT', 1, 'STREAMS', stream, last) then
      after[i] = last
    end
  end
  if total > 0 and after[i] == '' then  -- it asks again at once
    for j = 1, #KEYS do after[j] = '' end
    break
  end
end
return {found, after}
