-- Note that a request was handed off: prefill's job is durable. No worker needs to take the request over in prefill,
-- and its attempts are reset.
--
-- KEYS[1]  record   hash
-- ARGV     id, epoch, format of `held` keys
--
-- Replies  1 noted, 0 the request is not in prefill under this epoch any more: decode claimed it, or it ended
--
-- Crash    before: the session expires, and another worker prefills the request again. Decode does not wait for that.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'stage', 'session')
if r[1] ~= ARGV[2] or r[2] ~= 'prefill' then return 0 end
if (r[3] or '') ~= '' then redis.call('SREM', string.format(ARGV[3], r[3]), ARGV[1]) end
redis.call('HSET', KEYS[1], 'stage', 'handed', 'session', '', 'attempts', 0, 'message', '')
return 1
