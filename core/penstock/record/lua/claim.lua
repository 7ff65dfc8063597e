-- Claim a request for a worker that holds a delivery of it. Without a session, park the request: its message is kept in
-- the record, as if a worker had claimed and released it, so that any worker of the stage can take the request over.
--
-- KEYS[1]  record    hash
-- KEYS[2]  log       stream
-- KEYS[3]  sessions  sorted set, the pipeline's: session ids, by the time in ms until which they last
-- KEYS[4]  free      sorted set, a stage's: ids of requests, by the time in ms from which on any worker may take them
-- ARGV     id, stage ('prefill' or 'decode'), session, name to bind (the job's, or that of the request's own message),
--          body hash ('' with a job), lease in ms, longest waiting time in ms, ttl of a pending record in ms, hash
--          before the first token, the delivery's message, format of `held` keys (a set for each session: ids of
--          requests), 1 if the id had a result when the message was sent, and the record of that result had not expired
--          then, format of `ended` keys, days for which ids are remembered (see ended.lua)
--
-- Replies  {'claim', epoch, tokens, hash, ended, cancelled, attempts, most tokens of one attempt, reading, returns};
--                           ended: 1 if this message settles the result, 2 if a job must; reading: 0 if the log was
--                           begun by a worker that read control tokens in texts of users as control tokens; returns:
--                           how often decode gave the request back to prefill
--          {'busy', ms, epoch}  a session holds the request, by the claim of that epoch, or the request waits for its
--                           next attempt: claim it again after that time. Also if the caller's session has ended: the
--                           worker opens a new session soon
--          {'parked'}       without a session: a worker can take the request over, or no worker needs to
--          {'bound'}        another durable message settles this request, or has settled it
--          {'conflict'}     the id belongs to a request with another body
--
-- A prefill worker finds out here that a request is bound to the request's own message (`finish.lua` binds it): then
-- this message settles the result. If a request has ended and no message is bound, a claim does not bind the request's
-- own message: that message may have been settled with a job since, and the caller may not know yet that the bus gave
-- it to another member. The caller therefore hands the request off again, and the first job that is claimed is bound.
-- An endpoint worker claims requests as decode claims jobs, and binds their messages at once.
--
-- Crash    before: nothing has changed. After: the session expires, and the request is free with the message kept here;
--          or a worker claims it when the bus delivers it again. Either claim has the next epoch. A decode claim has
--          bound its job, which is durable.
--
-- Invariant: a record's `session` is empty, or names a live session whose `held` set contains the request. Claim, take,
-- release, handed, finish and reap change both together. An epoch is the server's clock in ms, or the last epoch plus
-- 1: a server that lost its last writes, or all of them, does not assign an epoch twice.
--
-- `reading` is the epoch of the last claim, if all tokens of the log come from workers that read control tokens in
-- texts of users as plain text. A claim by a worker of an older version changes the epoch and not `reading`. A lost
-- record has no `reading`.

local id, stage, session, name, body = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local lease, longest, prefill, parks = tonumber(ARGV[6]), tonumber(ARGV[7]), stage == 'prefill', session == ''
local r = redis.call('HMGET', KEYS[1], 'epoch', 'session', 'stage', 'bound', 'body', 'tokens', 'hash', 'attempts', 'cancelled',
  'not_before', 'most', 'reading', 'returns')
local epoch, holder, was, bound = tonumber(r[1] or 0), r[2] or '', r[3] or 'new', r[4] or ''
local tokens, hash, attempts, cancelled = tonumber(r[6] or 0), r[7] or ARGV[9], tonumber(r[8] or 0), r[9] and 1 or 0
local most = was == stage and tonumber(r[11] or 0) or 0
local last, returns = epoch, tonumber(r[13] or 0)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- 0. Read the end of the log. A record that lacks the log's end is updated, and expires together with the log.
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

-- An id that is remembered without a record keeps its binding: the bound message may not be settled yet. Then the answer
-- is computed again; any other message of the id is stale, or conflicts.
local told = not r[3] and find_end(ARGV[13], tonumber(ARGV[14]), id)
if told then
  bound = string.sub(told, 1, 8) == pack_name(name) and name or 'another'
  if body ~= '' and #told > 8 and string.sub(told, 9) ~= pack_name(body) then r[5] = 'another' end
end

-- 1. A request with the same id and another body is another request.
if body ~= '' and r[5] and r[5] ~= '' and r[5] ~= body then return {'conflict'} end

-- 2. Another message is bound. The bound message settles the result, and the binding never changes. A request that was
--    handed off is settled by its job. The record of an answered request may have expired together with its binding.
if ARGV[12] == '1' then return {'bound'} end
if prefill and was == 'handed' then return {'bound'} end
if bound ~= '' and bound ~= name then return {'bound'} end

-- 3. Do not park a request that was claimed before: a worker can take it over already, or it is in the next stage.
if parks and (was == 'end' or (was == stage and redis.call('HSTRLEN', KEYS[1], 'message') > 0)) then return {'parked'} end

-- 4. The request has ended. The worker that holds a job, or the bound message, settles the result from the log.
if was == 'end' then
  if not prefill then
    redis.call('HSET', KEYS[1], 'bound', name)
    if bound == '' then remember_end(ARGV[13], tonumber(ARGV[14]), id, name, r[5] or '') end
  end
  return {'claim', epoch, tokens, hash, prefill and bound == '' and 2 or 1, cancelled, attempts, most, 1, returns}
end

-- 5. A session holds the request, or the request waits for its next attempt. Decode does not wait for prefill's
--    session, as its job proves that prefill is done; but where its job is bound, decode gave the request back, and
--    prefill passes it on (`handed.lua`). A time too far ahead was written before the clock went back: ignore it.
if not parks and not redis.call('ZSCORE', KEYS[3], session) then return {'busy', math.ceil(lease / 3), epoch} end
if prefill or was ~= 'prefill' or bound ~= '' then
  local lasts, wait = holder ~= '' and redis.call('ZSCORE', KEYS[3], holder), tonumber(r[10] or 0) - now
  if lasts then return {'busy', math.max(math.ceil(lease / 4), math.min(lasts - now, lease)), epoch} end
  if wait > 0 and wait <= longest then return {'busy', wait, epoch} end
  if not prefill and was == 'prefill' then return {'busy', math.ceil(lease / 4), epoch} end
end

-- 6. Claim or park the request. A job proves that prefill's attempts succeeded: decode counts its own from 0.
if not prefill and was == 'prefill' then attempts = 0 end
if not parks then attempts = attempts + 1 end
epoch = math.max(epoch + 1, now)
local reading = (tokens == 0 or tonumber(r[12] or 0) == last) and 1 or 0
if reading == 1 then redis.call('HSET', KEYS[1], 'reading', epoch) end
redis.call('HSET', KEYS[1], 'epoch', epoch, 'session', session, 'not_before', 0, 'stage', stage, 'attempts', attempts,
  'most', most, 'tokens', tokens, 'hash', hash, 'message', ARGV[10])
if body ~= '' then redis.call('HSET', KEYS[1], 'body', body) end
if not prefill or told then redis.call('HSET', KEYS[1], 'bound', name) end
if holder ~= '' then redis.call('SREM', string.format(ARGV[11], holder), id) end
if parks then
  redis.call('ZADD', KEYS[4], now, id)
else
  redis.call('SADD', string.format(ARGV[11], session), id)
  redis.call('ZREM', KEYS[4], id)
end
redis.call('PEXPIRE', KEYS[1], ARGV[8])
redis.call('PEXPIRE', KEYS[2], ARGV[8])
if parks then return {'parked'} end
return {'claim', epoch, tokens, hash, 0, cancelled, attempts, most, reading, returns}
