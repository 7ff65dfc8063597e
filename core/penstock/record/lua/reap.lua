-- End expired sessions, each as a whole: the requests that they hold are free, and a late renewal finds its session
-- ended.
--
-- KEYS[1]  sessions  sorted set, see claim.lua
-- KEYS[2]  free      sorted set, prefill's, see claim.lua
-- KEYS[3]  free      sorted set, decode's
-- ARGV     time in ms at which a session must have expired, lease in ms, a session that ends in any case or '', formats
--          of the keys `held`, `news` and record
--
-- Replies  {number of free requests in prefill, in decode, {sessions that ended…}}
--
-- Crash    before: nothing has changed.
--
-- The caller passes the time of its own last renewal. A session that expired only since then is kept: the clock may
-- have been put forward, or the server may have stood still. A session that lasts for more than two leases was renewed
-- before the clock went back: it gets one lease from now on. Its next renewal comes within half a lease, and still
-- finds that the clock went back: see renew.lua.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, session in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now + 2 * ARGV[2], '+inf')) do
  redis.call('ZADD', KEYS[1], now + ARGV[2], session)
end
local over = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. ARGV[1], 'LIMIT', 0, 100)
if ARGV[3] ~= '' then over[#over + 1] = ARGV[3] end
for _, session in ipairs(over) do
  local held = string.format(ARGV[4], session)
  for _, id in ipairs(redis.call('SMEMBERS', held)) do
    local record = string.format(ARGV[6], id)
    local r = redis.pcall('HMGET', record, 'session', 'stage')
    if r[1] == session then  -- a key that is not a record belongs to no session
      redis.call('HSET', record, 'session', '')
      redis.call('ZADD', r[2] == 'prefill' and KEYS[2] or KEYS[3], now, id)
    end
  end
  redis.call('DEL', held, string.format(ARGV[5], session))
  redis.call('ZREM', KEYS[1], session)
end
return {redis.call('ZCOUNT', KEYS[2], '-inf', now), redis.call('ZCOUNT', KEYS[3], '-inf', now), over}
