-- A worker takes requests that are free: of sessions that are over, given back, or parked. It needs no deliveries: the
-- messages are here.
--
-- KEYS[1]  free      sorted set, a stage's, see claim.lua
-- KEYS[2]  sessions  sorted set, see claim.lua
-- KEYS[3]  held      set of the session's
-- ARGV     session, stage, how many at most, the longest waiting time in ms, keep of a pending record in ms, hash before
--          the first token, what record and log keys look like
--
-- Replies  for each {id, {'claim', epoch, tokens, hash, 0, cancelled, attempts, most, reading}, message}; none where the session is over
--
-- Crash    before: nothing happened. After: the session runs out, and they are free again.
--
-- What makes this safe: the epoch moves on, so whoever held one of them is refused; and who takes settles nothing, so it
-- does not matter whether the delivery is at this moment on its way to somebody.

if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then return {} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[3])
if #due == 0 then  -- what lies too far ahead was written before the clock went back
  due = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now + ARGV[4], '+inf', 'LIMIT', 0, ARGV[3])
end
local taken = {}
local function take(id)
  local record, log = string.format(ARGV[7], id), string.format(ARGV[8], id)
  local r = redis.call('HMGET', record, 'epoch', 'session', 'stage', 'tokens', 'hash', 'attempts', 'cancelled', 'message',
    'most', 'reading')
  local tokens, hash, has_end = read_log_end(log, tonumber(r[4]), r[5], ARGV[6])
  -- Others ended, were handed off, or are another stage's by now. Of an end that the record lacks the next claim hears.
  if r[3] == ARGV[2] and (r[2] or '') == '' and (r[8] or '') ~= '' and not has_end then
    local epoch, attempts = math.max(tonumber(r[1]) + 1, now), tonumber(r[6] or 0) + 1
    local reading = (tokens == 0 or tonumber(r[10] or 0) == tonumber(r[1])) and 1 or 0  -- see claim.lua
    if reading == 1 then redis.call('HSET', record, 'reading', epoch) end
    redis.call('HSET', record, 'epoch', epoch, 'session', ARGV[1], 'not_before', 0, 'attempts', attempts, 'tokens', tokens,
      'hash', hash)
    redis.call('SADD', KEYS[3], id)
    redis.call('PEXPIRE', record, ARGV[5])
    redis.call('PEXPIRE', log, ARGV[5])
    taken[#taken + 1] = {id, {'claim', epoch, tokens, hash, 0, r[7] and 1 or 0, attempts, tonumber(r[9] or 0), reading}, r[8]}
  end
end
for _, id in ipairs(due) do
  redis.call('ZREM', KEYS[1], id)
  pcall(take, id)  -- one whose record is none is left to its delivery
end
return taken
