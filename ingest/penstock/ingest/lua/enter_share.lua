-- Reserve tokens of a pipeline for a tenant, unless a full pipeline holds more than the tenant's share.
--
-- KEYS[1]  tickets  sorted set, by time of expiry in s
-- KEYS[2]  tokens   hash, reserved tokens by tenant
-- KEYS[3]  weights  hash, by tenant that has reserved tokens
-- ARGV     ticket, tenant, tokens, weight, ttl of the ticket in s, 1 if the pipeline is full
--
-- Replies  1 the tokens are reserved, 0 the tenant has more than its share

local now = tonumber(redis.call('TIME')[1])
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)) do
  local tenant, tokens = string.match(old, '^[^|]*|([^|]*)|(%d+)$')
  redis.call('ZREM', KEYS[1], old)
  if redis.call('HINCRBY', KEYS[2], tenant, -tokens) <= 0 then
    redis.call('HDEL', KEYS[2], tenant)
    redis.call('HDEL', KEYS[3], tenant)
  end
end
local tenant, tokens, weight = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local mine = tonumber(redis.call('HGET', KEYS[2], tenant) or 0)
if ARGV[6] == '1' and mine > 0 then
  local held, weights = 0, weight
  local flat = redis.call('HGETALL', KEYS[2])
  for i = 1, #flat, 2 do
    held = held + tonumber(flat[i + 1])
    if flat[i] ~= tenant then weights = weights + tonumber(redis.call('HGET', KEYS[3], flat[i]) or 1) end
  end
  if mine * weights > held * weight then return 0 end
end
redis.call('ZADD', KEYS[1], now + ARGV[5], ARGV[1])
redis.call('HINCRBY', KEYS[2], tenant, tokens)
redis.call('HSET', KEYS[3], tenant, weight)
return 1
