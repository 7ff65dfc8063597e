-- A process writes the heartbeat of a worker's name, if nobody else holds the name: the heartbeat is the lease on it.
--
-- KEYS[1]  heartbeat  string, JSON with the holder's token, host and pid
-- KEYS[2]  workers    set of all heartbeat keys
-- KEYS[3]  left       string: the worker left in good order
-- ARGV     token, heartbeat as JSON ('' gives the name up), lease in ms (after '': for how long `left` is kept), then what
--          the keys of heartbeats begin with that are to be counted
--
-- Replies  {number of other heartbeats counted}; or {heartbeat of the holder, ms that its lease still lasts}: nothing
--          was changed
--
-- Crash    the heartbeat runs out, and the name is free.

local found = redis.call('GET', KEYS[1])
if found and cjson.decode(found)['token'] ~= ARGV[1] then return {found, redis.call('PTTL', KEYS[1])} end
if ARGV[2] == '' then
  redis.call('SET', KEYS[3], '', 'PX', ARGV[3])
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  redis.call('SADD', KEYS[2], KEYS[1])
  redis.call('DEL', KEYS[3])
end
local others = 0
if #ARGV > 3 then
  for _, key in ipairs(redis.call('SMEMBERS', KEYS[2])) do
    for i = 4, #ARGV do
      if key ~= KEYS[1] and string.sub(key, 1, #ARGV[i]) == ARGV[i] then others = others + redis.call('EXISTS', key) end
    end
  end
end
return {others}
