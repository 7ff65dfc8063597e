-- Read the heartbeats of workers.
--
-- KEYS[1]  workers    set of all heartbeat keys
-- ARGV     prefixes of the heartbeat keys to read
--
-- Replies  for each heartbeat: {its key, the heartbeat, rest of its lease in ms}

local found = {}
for _, key in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  for _, prefix in ipairs(ARGV) do
    local beat = string.sub(key, 1, #prefix) == prefix and redis.call('GET', key)
    if beat then table.insert(found, {key, beat, redis.call('PTTL', key)}) end
  end
end
return found
