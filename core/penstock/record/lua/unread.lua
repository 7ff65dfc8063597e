-- End a request that no worker has seen: its message was deleted from its topic, or this region adopted the request and
-- would compute other tokens than its home.
--
-- KEYS[1]  record  hash
-- KEYS[2]  log     stream
-- ARGV     end event as JSON, ttl of an ended stream in ms
--
-- Replies  1 ended: live readers find the end in the log after a silence, because gateways may not publish; 0 a worker
--          has seen the request. A worker that receives the message after all settles it with this end
--
-- Crash    before: nothing has changed.

local stage = redis.call('HGET', KEYS[1], 'stage') or 'new'
if stage ~= 'new' or redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('XADD', KEYS[2], '0-2', 'e', ARGV[1])
redis.call('HSET', KEYS[1], 'stage', 'end')
for i = 1, 2 do redis.call('PEXPIRE', KEYS[i], ARGV[2]) end
return 1
