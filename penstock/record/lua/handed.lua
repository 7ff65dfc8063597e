-- Prefill's job is durable: nobody needs to take the request over, and its attempts came to something.
--
-- KEYS[1]  record   hash
-- ARGV     epoch
--
-- Replies  1 noted, 0 the request went on without us (decode has it, or it ended)
--
-- Crash    before: the lease runs out; decode does not wait for it.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'stage')
if r[1] ~= ARGV[1] or r[2] ~= 'prefill' then return 0 end
redis.call('HSET', KEYS[1], 'stage', 'handed', 'lease', 0, 'owner', '', 'attempts', 0, 'message', '')
return 1
