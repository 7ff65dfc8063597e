-- A process writes the heartbeat of a worker's name, if nobody else holds the name: the heartbeat is the lease on it.
-- Where asked, not if workers of the pipeline compute by another arithmetic, and none by the same.
--
-- KEYS[1]  heartbeat  string, JSON with the holder's token, host and pid
-- KEYS[2]  workers    set of all heartbeat keys
-- KEYS[3]  left       string: the worker left in good order
-- ARGV     token, heartbeat as JSON ('' gives the name up), lease in ms (after '': for how long `left` is kept), what the
--          keys of heartbeats begin with whose `arithmetic` is to be compared ('': none), 1 if another one is accepted,
--          then what the keys of heartbeats begin with that are to be counted
--
-- Replies  {number of other heartbeats counted}, with a heartbeat of another `arithmetic` behind it, if there is one, and
--          none of the same; or, where nothing was changed,
--          {heartbeat of the holder, ms that its lease still lasts}, or
--          {the heartbeat of another `arithmetic` that lasts longest, ms that it still lasts, ''}
--
-- Crash    the heartbeat runs out, and the name is free.

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
local others = 0
if #ARGV > 5 then
  for _, key in ipairs(redis.call('SMEMBERS', KEYS[2])) do
    for i = 6, #ARGV do
      if key ~= KEYS[1] and string.sub(key, 1, #ARGV[i]) == ARGV[i] then others = others + redis.call('EXISTS', key) end
    end
  end
end
if other then return {others, other} end
return {others}
