-- A worker asks for a request, with the delivery it holds. Without an owner it only puts the request down: as if it
-- claimed it and gave it back, so that others can take it over when the worker dies.
--
-- KEYS[1]  record   hash
-- KEYS[2]  log      stream
-- ARGV     stage ('prefill' or 'decode'), owner, job ('' in prefill), body hash ('' in decode),
--          lease in ms, keep of a pending record in ms, hash before the first token, the delivery's message
--
-- Replies  {'claim', epoch, tokens, hash, ended, cancelled, attempts}
--          {'busy', ms}     another holds the lease, or it is to be left alone, for that long at most
--          {'down'}         without an owner: it can be taken over, or nobody has to
--          {'bound'}        another message settles this request, and is durable
--          {'conflict'}     the id was used for another body
--
-- Crash    before: nothing happened. After: the lease runs out, and somebody takes the request over with the message
--          that is kept here, or claims it with the delivery when that comes back; either gets the next epoch. A decode
--          claim has bound its job, which is durable.
--
-- An epoch is the server's clock in ms, or one more than the last: a server that forgot its last writes, or all of
-- them, does not give one out a second time.

local stage, owner, job, body = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local prefill = stage == 'prefill'
local r = redis.call('HMGET', KEYS[1], 'epoch', 'lease', 'stage', 'bound', 'body', 'tokens', 'hash', 'attempts', 'cancelled')
local epoch, lease, was, bound = tonumber(r[1] or 0), tonumber(r[2] or 0), r[3] or 'new', r[4] or ''
local tokens, hash, attempts, cancelled = tonumber(r[6] or 0), r[7] or ARGV[7], tonumber(r[8] or 0), r[9] and 1 or 0
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local puts_down = owner == ''

-- 1. The same id with another body is another request.
if prefill and r[5] and r[5] ~= '' and r[5] ~= body then return {'conflict'} end

-- 2. A job that is durable: one settles the result, which it is never changes. Prefill notes what it handed off.
if prefill and was == 'handed' then return {'bound'} end
if bound ~= '' and bound ~= job then return {'bound'} end

-- 3. To put it down is no use where it was claimed before: it can be taken over, or it went on.
if puts_down then
  local is_kept = was == stage and redis.call('HSTRLEN', KEYS[1], 'message') > 0
  if is_kept or was == 'end' or (prefill and was == 'handed') then return {'down'} end
end

-- 4. Ended. Prefill hands off (again); decode settles the result from the log.
if was == 'end' then
  if prefill then
    epoch = math.max(epoch + 1, now)
    redis.call('HSET', KEYS[1], 'epoch', epoch)
  else
    redis.call('HSET', KEYS[1], 'bound', job)
  end
  return {'claim', epoch, tokens, hash, 1, cancelled, attempts}
end

-- 5. Somebody works on it, or it waits to be tried again. A job in hand proves that prefill is done with it, so decode
--    does not wait for prefill's lease.
if lease > now and (prefill or was ~= 'prefill') then return {'busy', lease - now} end

-- 6. It is ours.
epoch, lease = math.max(epoch + 1, now), puts_down and 1 or now + ARGV[5]
if not puts_down then attempts = attempts + 1 end
redis.call('HSET', KEYS[1], 'epoch', epoch, 'owner', owner, 'lease', lease, 'stage', stage, 'attempts', attempts,
  'tokens', tokens, 'hash', hash, 'message', ARGV[8])
if prefill then redis.call('HSET', KEYS[1], 'body', body) else redis.call('HSET', KEYS[1], 'bound', job) end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
if puts_down then return {'down'} end
return {'claim', epoch, tokens, hash, 0, cancelled, attempts}
