-- Count results of one partition and advance its stored offset in one step.
--
-- KEYS[1]  offsets  hash, by partition
-- KEYS[2]  seen     sorted set, the ids that were counted last
-- KEYS[3…] usage    for each day two hashes: by tenant; by tenant, key, model and class
-- ARGV     partition, the offset that must be stored now ('': none), its new offset, number of ids to remember, then
--          for each result: id, index of its day (from 1), tenant, what else tells it apart (with the tenant, as JSON),
--          prefill tokens, cached tokens, decode tokens
--
-- Replies  1 counted, 0 another offset is stored: nothing was changed

if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
local now = redis.call('TIME')
now = now[1] * 1e6 + now[2]
for at = 5, #ARGV, 7 do
  if redis.call('ZADD', KEYS[2], 'NX', string.format('%.0f', now), ARGV[at]) == 1 then
    for which = 0, 1 do
      local day, whose = KEYS[1 + 2 * tonumber(ARGV[at + 1]) + which], ':' .. ARGV[at + 2 + which]
      redis.call('HINCRBY', day, 'requests' .. whose, 1)
      redis.call('HINCRBY', day, 'prefill_tokens' .. whose, ARGV[at + 4])
      redis.call('HINCRBY', day, 'cached_tokens' .. whose, ARGV[at + 5])
      redis.call('HINCRBY', day, 'decode_tokens' .. whose, ARGV[at + 6])
    end
  end
end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - tonumber(ARGV[4]))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
