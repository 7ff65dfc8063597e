-- Take over free requests for a worker: requests of ended sessions, released requests, and parked requests. The worker
-- needs no deliveries: the records have the messages.
--
-- KEYS[1]  free      sorted set, a stage's, see claim.lua
-- KEYS[2]  sessions  sorted set, see claim.lua
-- KEYS[3]  held      set of the session's
-- ARGV     session, stage, most requests to take, longest waiting time in ms, ttl of a pending record in ms, hash
--          before the first token, formats of record and log keys
--
-- Replies  for each request {id, {'claim', epoch, tokens, hash, 0, cancelled, attempts, most, reading, returns},
--          message}; {} if the session has ended
--
-- Crash    before: nothing has changed. After: the session expires, and the requests are free again.
--
-- A take-over is safe for two reasons. The next epoch fences the worker that held the request before. A take-over
-- settles no delivery, so the bus may deliver the message to another member at the same time.

if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then return {} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[3])
if #due == 0 then  -- a time too far ahead was written before the clock went back
  due = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now + ARGV[4], '+inf', 'LIMIT', 0, ARGV[3])
end
local taken = {}
local function take(id)
  local record, log = string.format(ARGV[7], id), string.format(ARGV[8], id)
  local r = redis.call('HMGET', record, 'epoch', 'session', 'stage', 'tokens', 'hash', 'attempts', 'cancelled', 'message',
    'most', 'reading', 'returns')
  local tokens, hash, has_end = read_log_end(log, tonumber(r[4]), r[5], ARGV[6])
  -- Any other request has ended, was handed off, or is in another stage. A record that lacks the end is updated by the
  -- next claim.
  if r[3] == ARGV[2] and (r[2] or '') == '' and (r[8] or '') ~= '' and not has_end then
    local epoch, attempts = math.max(tonumber(r[1]) + 1, now), tonumber(r[6] or 0) + 1
    local reading = (tokens == 0 or tonumber(r[10] or 0) == tonumber(r[1])) and 1 or 0  -- see claim.lua
    if reading == 1 then redis.call('HSET', record, 'reading', epoch) end
    redis.call('HSET', record, 'epoch', epoch, 'session', ARGV[1], 'not_before', 0, 'attempts', attempts, 'tokens', tokens,
      'hash', hash)
    redis.call('SADD', KEYS[3], id)
    redis.call('PEXPIRE', record, ARGV[5])
    redis.call('PEXPIRE', log, ARGV[5])
    taken[#taken + 1] = {id, {'claim', epoch, tokens, hash, 0, r[7] and 1 or 0, attempts, tonumber(r[9] or 0), reading,
      tonumber(r[11] or 0)}, r[8]}
  end
end
for _, id in ipairs(due) do
  redis.call('ZREM', KEYS[1], id)
  pcall(take, id)  -- a request whose key is not a record is left to its delivery
end
return taken
