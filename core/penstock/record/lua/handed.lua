-- Prefill's job is durable: nobody needs to take the request, and its attempts came to something.
--
-- KEYS[1]  record   hash
-- ARGV     id, epoch, what `held` keys look like
--
-- Replies  1 noted, 0 the request went on without us (decode has it, or it ended)
--
-- Crash    before: the session runs out, and the request is prefilled again; decode does not wait for it.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'stage', 'session')
if r[1] ~= ARGV[2] or r[2] ~= 'prefill' then return 0 end
if (r[3] or '') ~= '' then redis.call('SREM', string.format(ARGV[3], r[3]), ARGV[1]) end
redis.call('HSET', KEYS[1], 'stage', 'handed', 'session', '', 'attempts', 0, 'message', '')
return 1
