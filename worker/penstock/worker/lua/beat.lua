-- Write the heartbeat of a worker's name, unless another process holds the name: the heartbeat is the lease on the
-- name. On request, refuse it if workers of the pipeline have another `arithmetic`, and none has the same.
--
-- KEYS[1]  heartbeat  string, JSON with the holder's token, host and pid
-- KEYS[2]  workers    set of all heartbeat keys
-- KEYS[3]  left       string: the worker shut down normally
-- ARGV     token, heartbeat as JSON ('' releases the name), lease in ms (with '': ttl of `left`), prefix of the
--          heartbeat keys whose `arithmetic` is compared ('': none), 1 if another `arithmetic` is accepted, then the
--          prefixes of the heartbeat keys to count
--
-- Replies  {number of other heartbeats with each of these prefixes}, followed by a heartbeat of another `arithmetic` if
--          there is one and none has the same; or, if nothing was changed,
--          {heartbeat of the holder, rest of its lease in ms}, or
--          {the heartbeat of another `arithmetic` that lasts longest, rest of its lease in ms, ''}
--
-- Crash    the heartbeat expires, and the name is free.

local found = redis.call('GET', KEYS[1])
if found and cjson.decode(found)['token'] ~= ARGV[1] then return {found, redis.call('PTTL', KEYS[1])} end
local other, lasts = nil, -1
if ARGV[4] ~= '' then
  local mine = cjson.decode(ARGV[2])['arithmetic']
  for _, key in ipairs(redis.call('SMEMBERS', KEYS[2])) do
    local beat = key ~= KEYS[1] and string.sub(key, 1, #ARGV[4]) == ARGV[4] and redis.call('GET', key)
    local theirs = beat and cjson.decode(beat)['arithmetic']
    if theirs == mine then
      other = nil
      break
    end
    local left = theirs and redis.call('PTTL', key) or -1
    if left > lasts then other, lasts = beat, left end
  end
  if other and ARGV[5] == '0' then return {other, lasts, ''} end
end
if ARGV[2] == '' then
  redis.call('SET', KEYS[3], '', 'PX', ARGV[3])
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  redis.call('SADD', KEYS[2], KEYS[1])
  redis.call('DEL', KEYS[3])
end
local others = {}
for i = 6, #ARGV do
  others[i - 5] = 0
  for _, key in ipairs(redis.call('SMEMBERS', KEYS[2])) do
    if key ~= KEYS[1] and string.sub(key, 1, #ARGV[i]) == ARGV[i] then
      others[i - 5] = others[i - 5] + redis.call('EXISTS', key)
    end
  end
end
if other then return {others, other} end
return {others}
