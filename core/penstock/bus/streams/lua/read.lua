-- Deliver new messages to a worker from the groups that it is in, limited by class. If the worker receives all new
-- messages, the reply has the entry of each stream after which it may block for the next ones.
--
-- KEYS     the streams, in the order in which they are read
-- ARGV     capacity for messages of class 1, capacity for class 2, then for each stream: group, own consumer, class
--          (1 or 2)
--
-- Replies  for each stream: the entries that this call delivered to the consumer; then for each stream: the last entry
--          that its group has delivered, '' if undelivered entries follow it. If this call delivered entries and more
--          follow in any stream, this is '' for all streams

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
  if total > 0 and after[i] == '' then  -- the worker calls again at once
    for j = 1, #KEYS do after[j] = '' end
    break
  end
end
return {found, after}
