#!lua flags=allow-oom
-- allow-oom: the scripts must be able to remove blocks when the server is out of memory.
--
-- Common beginning of all scripts of the index. The index lists the KV blocks on one server. The blocks are keys of
-- their own, which no script reads or writes.
--
-- KEYS[1]  used    zset   blocks that may be evicted, by last use (the index's clock, microseconds), or by the end of
--                         their retention, if it has not come yet
-- KEYS[2]  held    zset   leased blocks, which may not be evicted, in the same order
-- KEYS[3]  sizes   hash   bytes of each block in `used` and `held`
-- KEYS[4]  leases  hash   for each leased block: its owners and the end of each owner's lease (ms), as JSON
-- KEYS[5]  ends    zset   leased blocks by the end of their last lease (ms)
-- KEYS[6]  state   hash   sum: bytes of all blocks; held: bytes of leased blocks; clock: latest use; budget, keep: last
--                         set
-- ARGV[1]  budget in bytes, 0: the last one set
-- ARGV[2]  keep in ms, 0: the last one set
--
-- An index that lost a key (by eviction, expiry or tampering) is deleted and built again: blocks are added when they
-- are used, and the other blocks expire.

local USED, HELD, SIZES, LEASES, ENDS, STATE = unpack(KEYS)
local AT_ONCE = 64  -- most entries that one sweep removes

local function counted()
  local leased = redis.call('ZCARD', HELD)
  local all = redis.call('ZCARD', USED) + leased
  local bytes = tonumber(redis.call('HGET', STATE, 'sum') or 0)
  return redis.call('HLEN', SIZES) == all and redis.call('HLEN', LEASES) == leased and redis.call('ZCARD', ENDS) == leased
    and (all > 0) == (bytes > 0)  -- the server may lose all keys but the state, or only the state
end
local anew = not counted()
if anew then redis.call('DEL', unpack(KEYS)) end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local r = redis.call('HMGET', STATE, 'sum', 'held', 'clock', 'budget', 'keep')
local sum, held = tonumber(r[1] or 0), tonumber(r[2] or 0)
local clock = math.max(tonumber(r[3] or 0), time[1] * 1000000 + time[2])
local budget, keep = tonumber(ARGV[1]), tonumber(ARGV[2])
if budget == 0 then budget = tonumber(r[4] or 0) end
if keep == 0 then keep = tonumber(r[5] or 0) end

local function size_of(key) return tonumber(redis.call('HGET', SIZES, key) or 0) end

-- Advance the index's clock and return it: no two uses have the same time.
local function tick()
  clock = clock + 1
  return clock
end

-- End all leases of a block.
local function free(key)
  local score = redis.call('ZSCORE', HELD, key)
  if not score then return end
  redis.call('ZREM', HELD, key)
  redis.call('ZREM', ENDS, key)
  redis.call('HDEL', LEASES, key)
  redis.call('ZADD', USED, score, key)
  held = held - size_of(key)
end

-- Remove a block from the index. Return 1 if the block was in the index, else 0.
local function drop(key)
  free(key)
  sum = sum - size_of(key)
  redis.call('HDEL', SIZES, key)
  return redis.call('ZREM', USED, key)
end

-- End expired leases, at most AT_ONCE. Return the number of blocks whose last lease expired.
local function settle()
  local over = redis.call('ZRANGE', ENDS, '-inf', now, 'BYSCORE', 'LIMIT', 0, AT_ONCE)
  for _, key in ipairs(over) do free(key) end
  return #over
end

-- Remove blocks that were not used within `keep`, at most AT_ONCE. Return their keys: the caller deletes the blocks.
local function age()
  if keep == 0 then return {} end
  local old = redis.call('ZRANGE', USED, '-inf', (now - keep) * 1000, 'BYSCORE', 'LIMIT', 0, AT_ONCE)
  for _, key in ipairs(old) do drop(key) end
  return old
end

-- Save the state. Every script that changes the index ends with this: the index lives as long as its blocks.
local function save()
  redis.call('HSET', STATE, 'sum', sum, 'held', held, 'clock', clock, 'budget', budget, 'keep', keep)
  local last = redis.call('ZRANGE', ENDS, 0, 0, 'REV', 'WITHSCORES')
  local ttl = math.max(2 * keep, last[2] and tonumber(last[2]) - now + keep or 0, 60000)
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < ttl - math.min(ttl / 10, 10000) then redis.call('PEXPIRE', key, ttl) end
  end
end
