-- A worker asks for a request, with the delivery it holds. Without a session the request is only parked, by anybody who
-- read its message: as if it were claimed and given back, so that any worker of the stage can take it.
--
-- KEYS[1]  record    hash
-- KEYS[2]  log       stream
-- KEYS[3]  sessions  sorted set, the pipeline's: session ids, by the time in ms until which they last
-- KEYS[4]  free      sorted set, a stage's: ids of requests, by the time in ms from which on any worker may take them
-- ARGV     id, stage ('prefill' or 'decode'), session, the name that is bound (a job's, or that of the request's own
--          message), body hash ('' with a job), lease in ms, the longest waiting time in ms, keep of a pending record in ms, hash before the first token, the delivery's
--          message, what `held` keys look like (a set for each session: ids of requests), 1 if the id had a result already, and was not
--          forgotten again, when the message was sent
--
-- Replies  {'claim', epoch, tokens, hash, ended, cancelled, attempts, most tokens that one of them made, reading}; ended: 1
--                           where the message settles the result, 2 where a job has to; reading: 0 where the log was
--                           begun by a worker that took control tokens out of texts of users
--          {'busy', ms, epoch}  a session holds it, by the claim of that epoch, or it is to be left alone: ask again after
--                           that time. Also where the session that asks is over: the worker opens another one soon
--          {'down'}         without a session: it can be taken, or nobody has to
--          {'bound'}        another message settles this request, and is durable, or it has settled it
--          {'conflict'}     the id was used for another body
--
-- A worker that reads requests knows one that is bound to its own message (`finish.lua` binds it): it settles the
-- result. Where a request has ended and no message is bound, a claim does not bind the request's own: it may be settled
-- since, with a job, and the worker that asks may not know yet that the bus has given it to another one. So it hands the
-- request off again; the first job that is claimed is bound. A worker that asks an endpoint claims requests as decode
-- claims jobs, and binds their messages at once.
--
-- Crash    before: nothing happened. After: the session runs out, and the request is free, with the message that is kept
--          here; or it is claimed with the delivery when that comes back. Either gets the next epoch. A decode claim has
--          bound its job, which is durable.
--
-- A record's session is alive, and the request in the set of what that holds, or it is empty: claim, take, release, handed,
-- finish and reap change both together. An epoch is the server's clock in ms, or one more than the last: a server that
-- forgot its last writes, or all of them, does not give one out a second time.
--
-- `reading` is the epoch of the last claim of a worker whose prompts have no control tokens out of texts of users, if all
-- tokens of the log are of such workers. After a claim of an older worker it is another epoch. A record that was lost
-- tells nothing of older ones.

local id, stage, session, name, body = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local lease, longest, prefill, puts_down = tonumber(ARGV[6]), tonumber(ARGV[7]), stage == 'prefill', session == ''
local r = redis.call('HMGET', KEYS[1], 'epoch', 'session', 'stage', 'bound', 'body', 'tokens', 'hash', 'attempts', 'cancelled',
  'not_before', 'most', 'reading')
local epoch, holder, was, bound = tonumber(r[1] or 0), r[2] or '', r[3] or 'new', r[4] or ''
local tokens, hash, attempts, cancelled = tonumber(r[6] or 0), r[7] or ARGV[9], tonumber(r[8] or 0), r[9] and 1 or 0
local most = was == stage and tonumber(r[11] or 0) or 0
local last = epoch
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- 0. What the log has. A record that does not know of the end is told, and lives as long as the log.
if was ~= 'end' then
  local has_end
  tokens, hash, has_end = read_log_end(KEYS[2], tokens, hash, ARGV[9])
  if has_end then
    if holder ~= '' then redis.call('SREM', string.format(ARGV[11], holder), id) end
    was, epoch = 'end', math.max(epoch + 1, now)
    redis.call('HSET', KEYS[1], 'epoch', epoch, 'stage', was, 'session', '', 'message', '', 'tokens', tokens, 'hash', hash)
    redis.call('PEXPIRE', KEYS[1], math.max(1, redis.call('PTTL', KEYS[2])))
  end
end

-- 1. The same id with another body is another request.
if body ~= '' and r[5] and r[5] ~= '' and r[5] ~= body then return {'conflict'} end

-- 2. Another message that is durable: one settles the result, which it is never changes. Prefill notes what it handed off.
--    A record may have expired that had the binding of a request with a result.
if ARGV[12] == '1' then return {'bound'} end
if prefill and was == 'handed' then return {'bound'} end
if bound ~= '' and bound ~= name then return {'bound'} end

-- 3. To park it is no use where it was claimed before: it can be taken, or it went on.
if puts_down and (was == 'end' or (was == stage and redis.call('HSTRLEN', KEYS[1], 'message') > 0)) then return {'down'} end

-- 4. Ended. Who has a job, or the message that is bound, settles the result from the log.
if was == 'end' then
  if not prefill then redis.call('HSET', KEYS[1], 'bound', name) end
  return {'claim', epoch, tokens, hash, prefill and bound == '' and 2 or 1, cancelled, attempts, most, 1}
end

-- 5. Somebody works on it, or it waits to be tried again. A job in hand proves that prefill is done with it, so decode
--    does not wait for prefill. What lies too far ahead was written before the clock went back.
if not puts_down and not redis.call('ZSCORE', KEYS[3], session) then return {'busy', math.ceil(lease / 3), epoch} end
if prefill or was ~= 'prefill' then
  local lasts, wait = holder ~= '' and redis.call('ZSCORE', KEYS[3], holder), tonumber(r[10] or 0) - now
  if lasts then return {'busy', math.max(math.ceil(lease / 4), math.min(lasts - now, lease)), epoch} end
  if wait > 0 and wait <= longest then return {'busy', wait, epoch} end
end

-- 6. It is ours, or anybody's. Prefill's attempts came to something where its job is here.
if not prefill and was == 'prefill' then attempts = 0 end
if not puts_down then attempts = attempts + 1 end
epoch = math.max(epoch + 1, now)
local reading = (tokens == 0 or tonumber(r[12] or 0) == last) and 1 or 0
if reading == 1 then redis.call('HSET', KEYS[1], 'reading', epoch) end
redis.call('HSET', KEYS[1], 'epoch', epoch, 'session', session, 'not_before', 0, 'stage', stage, 'attempts', attempts,
  'most', most, 'tokens', tokens, 'hash', hash, 'message', ARGV[10])
if body ~= '' then redis.call('HSET', KEYS[1], 'body', body) end
if not prefill then redis.call('HSET', KEYS[1], 'bound', name) end
if holder ~= '' then redis.call('SREM', string.format(ARGV[11], holder), id) end
if puts_down then
  redis.call('ZADD', KEYS[4], now, id)
else
  redis.call('SADD', string.format(ARGV[11], session), id)
  redis.call('ZREM', KEYS[4], id)
end
redis.call('PEXPIRE', KEYS[1], ARGV[8])
redis.call('PEXPIRE', KEYS[2], ARGV[8])
if puts_down then return {'down'} end
return {'claim', epoch, tokens, hash, 0, cancelled, attempts, most, reading}
