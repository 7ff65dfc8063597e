-- Sessions whose time is over end, each as a whole: what they hold is free, and a renewal that comes late hears of it.
--
-- KEYS[1]  sessions  sorted set, see claim.lua
-- KEYS[2]  free      sorted set, prefill's, see claim.lua
-- KEYS[3]  free      sorted set, decode's
-- ARGV     as of when, in ms, lease in ms, a session that ends in any case, or '', what the keys `held`, `news` and record
--          look like
--
-- Replies  {number of requests that are free in prefill, in decode, {sessions that ended…}}
--
-- Crash    before: nothing happened.
--
-- Who asks gives the time of its own last renewal: sessions that seem over because the clock was put forward since then,
-- or because the server stood still, are not over. One that lasts for two leases was renewed before the clock went back: it
-- lasts for one from now on. Its next renewal, within half a lease, still finds that the clock went back: see renew.lua.

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
    if r[1] == session then  -- what is no record is nobody's
      redis.call('HSET', record, 'session', '')
      redis.call('ZADD', r[2] == 'prefill' and KEYS[2] or KEYS[3], now, id)
    end
  end
  redis.call('DEL', held, string.format(ARGV[5], session))
  redis.call('ZREM', KEYS[1], session)
end
return {redis.call('ZCOUNT', KEYS[2], '-inf', now), redis.call('ZCOUNT', KEYS[3], '-inf', now), over}
