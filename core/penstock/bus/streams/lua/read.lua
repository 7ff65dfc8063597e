-- Deliver new messages to a worker from the groups that it is in, limited by class. If the worker receives all new
-- messages, the reply has the entry of each stream after which it may block for the next ones.
--
-- KEYS     the streams, in the order in which they are read
-- ARGV     capacity for messages of class 1, capacity for class 2, then for each stream: group, own consumer, class
--          (1 or 2); at the end, for how many ms a message is left to other workers
--
-- Replies  for each stream: the entries that this call delivered to the consumer; then for each stream: the last entry
--          that its group has delivered, '' if undelivered entries follow it. If this call delivered entries and more
--          follow in any stream, this is '' for all streams

local room = {tonumber(ARGV[1]), tonumber(ARGV[2])}
local patience = tonumber(ARGV[3 + 3 * #KEYS])

local function find_last(stream, group)
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = {}
    for j = 1, #flat, 2 do info[flat[j]] = flat[j + 1] end
    if info.name == group then return info['last-delivered-id'] end
  end
end

local function count_old(stream, group, most)
  if patience == 0 or most == 0 then return most end
  local now, last = redis.call('TIME'), find_last(stream, group)
  if not last then return most end
  local before = string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000) - patience)
  return #redis.call('XRANGE', stream, '(' .. last, before, 'COUNT', most)
end

local found, after, total = {}, {}, 0
for i, stream in ipairs(KEYS) do
  local group, me, class = ARGV[3 * i], ARGV[3 * i + 1], tonumber(ARGV[3 * i + 2])
  found[i], after[i] = {}, ''
  local count = count_old(stream, group, room[class])
  if count > 0 then
    local reply = redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', count, 'STREAMS', stream, '>')
    if reply then
      found[i] = reply[1][2]
      room[class] = room[class] - #found[i]
      total = total + #found[i]
    end
  end
end
for i, stream in ipairs(KEYS) do
  local last = find_last(stream, ARGV[3 * i])
  if last and not redis.call('XREAD', 'COUNT', 1, 'STREAMS', stream, last) then after[i] = last end
  if total > 0 and after[i] == '' then  -- the worker calls again at once
    for j = 1, #KEYS do after[j] = '' end
    break
  end
end
return {found, after}
