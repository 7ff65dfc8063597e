-- Index messages of one partition of a copied topic, and advance its stored offset in one step.
--
-- KEYS[1]  offsets   hash, by partition
-- KEYS[2]  open      hash: the place of the request of each id that has no result
-- KEYS[3]  answered  sorted set, the ids of the results that were copied last
-- ARGV     partition, the offset that must be stored now ('': none), its new offset, number of ids to remember, then
--          for each message: id, the request's place, or '' for a result
--
-- Replies  1 indexed, 0 another offset is stored: nothing was changed
--
-- A result may come before its request, whose topic is another: its id is among those answered, as long as these are
-- remembered. So is that of a request that was sent again after its result.

if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
local now = redis.call('TIME')
now = string.format('%.0f', now[1] * 1e6 + now[2])
for at = 5, #ARGV, 2 do
  local id, place = ARGV[at], ARGV[at + 1]
  if place == '' then
    redis.call('HDEL', KEYS[2], id)
    redis.call('ZADD', KEYS[3], now, id)
  elseif not redis.call('ZSCORE', KEYS[3], id) then
    redis.call('HSETNX', KEYS[2], id, place)
  end
end
redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -1 - tonumber(ARGV[4]))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
