-- Deliver new messages to a worker from the groups that it is in, limited by class. If the worker receives all new
-- messages, the reply has the entry of each stream after which it may block for the next ones.
--
-- KEYS     the streams, in the order in which they are read
-- ARGV     capacity for messages of class 1, capacity for class 2, then for each stream: group, own consumer, class
--          (1 or 2), and how many of the entries that wait may be taken (`Share` in pull.py): ahead, part ('': all),
--          and after how many ms each may
--
-- Replies  for each stream: the entries that this call delivered to the consumer; then for each stream: the last entry
--          that its group has delivered, '' if undelivered entries follow it. If this call delivered entries and more
--          follow in any stream, this is '' for all streams

local room = {tonumber(ARGV[1]), tonumber(ARGV[2])}

local function find_group(stream, name)
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = {}
    for j = 1, #flat, 2 do info[flat[j]] = flat[j + 1] end
    if info.name == name then return info end
  end
end

local function is_overdue(stream, last, wait_ms)
  local now, first = redis.call('TIME'), redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1]
  return first and now[1] * 1000 + now[2] / 1000 - string.match(first[1], '%d+') >= wait_ms
end

local function count_share(most, stream, name, ahead, part, wait_ms)
  local info = most > 0 and part ~= '' and find_group(stream, name)
  if not info then return most end
  local waiting = redis.call('XLEN', stream) - info.pending  -- what is settled is deleted
  local count = math.min(most, math.floor((waiting + ahead) * part))
  if count < 1 and is_overdue(stream, info['last-delivered-id'], tonumber(wait_ms)) then return 1 end
  return count
end

local found, after, total = {}, {}, 0
for i, stream in ipairs(KEYS) do
  local group, me, class, ahead, part, wait_ms = unpack(ARGV, 6 * i - 3, 6 * i + 2)
  class, found[i], after[i] = tonumber(class), {}, ''
  local count = count_share(room[class], stream, group, ahead, part, wait_ms)
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
  local info = find_group(stream, ARGV[6 * i - 3])
  local last = info and info['last-delivered-id']
  if last and not redis.call('XREAD', 'COUNT', 1, 'STREAMS', stream, last) then after[i] = last end
  if total > 0 and after[i] == '' then  -- the worker calls again at once
    for j = 1, #KEYS do after[j] = '' end
    break
  end
end
return {found, after}
