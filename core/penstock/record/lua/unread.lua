-- A request ends that no worker has seen, as its message is gone from its topic.
--
-- KEYS[1]  record  hash
-- KEYS[2]  log     stream
-- ARGV     end event as JSON, keep of an ended stream in ms
--
-- Replies  1 ended, which readers find after a silence, as gateways may not publish; 0 a worker has seen it. One that
--          gets its message after all settles it with this end
--
-- Crash    before: nothing happened.

local stage = redis.call('HGET', KEYS[1], 'stage') or 'new'
if stage ~= 'new' or redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('XADD', KEYS[2], '0-2', 'e', ARGV[1])
redis.call('HSET', KEYS[1], 'stage', 'end')
for i = 1, 2 do redis.call('PEXPIRE', KEYS[i], ARGV[2]) end
return 1
