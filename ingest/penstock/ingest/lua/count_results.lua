-- Count results of one partition and advance its stored offset in one step.
--
-- KEYS[1]  offsets  hash, by partition
-- KEYS[2]  seen     sorted set, the ids that were counted last
-- KEYS[3…] usage    hash, one for each day
-- ARGV     partition, the offset that must be stored now ('': none), its new offset, number of ids to remember, then
--          for each result: id, index of its day (from 1), tenant, prefill tokens, cached tokens, decode tokens
--
-- Replies  1 counted, 0 another offset is stored: nothing was changed

if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
local now = redis.call('TIME')
now = now[1] * 1e6 + now[2]
for at = 5, #ARGV, 6 do
  if redis.call('ZADD', KEYS[2], 'NX', string.format('%.0f', now), ARGV[at]) == 1 then
    local day, tenant = KEYS[2 + tonumber(ARGV[at + 1])], ARGV[at + 2]
    redis.call('HINCRBY', day, 'requests:' .. tenant, 1)
    redis.call('HINCRBY', day, 'prefill_tokens:' .. tenant, ARGV[at + 3])
    redis.call('HINCRBY', day, 'cached_tokens:' .. tenant, ARGV[at + 4])
    redis.call('HINCRBY', day, 'decode_tokens:' .. tenant, ARGV[at + 5])
  end
end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - tonumber(ARGV[4]))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
