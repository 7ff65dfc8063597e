-- Pass a request on to the other stage, and reset its attempts.
--
-- KEYS[1]  record         hash
-- KEYS[2]  free           sorted set, prefill's, see claim.lua
-- KEYS[3]  free           sorted set, decode's
-- ARGV     id, epoch, format of `held` keys
--
-- Replies  1 passed on, 0 the caller does not hold the request under this epoch any more, or has passed it on before
--
-- Without a bound job, prefill's is durable: the request waits for it, and no worker needs to take it over in prefill.
-- With a bound job, decode gives the request back, as it lacks KV inside a picture; or prefill has computed that again.
-- The job stays bound and its delivery unsettled: it settles the result. Any worker of the other stage takes the request
-- over with the job, which the record has. Claims with the job's delivery wait until the request is decode's again.
--
-- Crash    before: the session expires, and another worker of the stage goes on. Decode does not wait for that where no
--          job is bound. After: nothing is lost.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'stage', 'session', 'bound')
local was, holder = r[2], r[3] or ''
if r[1] ~= ARGV[2] or (was ~= 'prefill' and was ~= 'decode') then return 0 end
local is_bound = (r[4] or '') ~= ''
if is_bound and holder == '' then return 0 end
if holder ~= '' then redis.call('SREM', string.format(ARGV[3], holder), ARGV[1]) end
redis.call('HSET', KEYS[1], 'session', '', 'attempts', 0, 'most', 0)
if not is_bound then
  redis.call('HSET', KEYS[1], 'stage', 'handed', 'message', '')
  return 1
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'stage', was == 'decode' and 'prefill' or 'decode')
redis.call('ZADD', was == 'decode' and KEYS[2] or KEYS[3], now, ARGV[1])
if was == 'decode' then redis.call('HINCRBY', KEYS[1], 'returns', 1) end
return 1
