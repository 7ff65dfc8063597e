#!lua flags=allow-oom
-- allow-oom: blocks can be removed from a server that is out of memory, too.
--
-- The beginning of all scripts of the index. The index has the blocks of one server; the blocks themselves are keys of
-- their own, which no script uses.
--
-- KEYS[1]  used    zset   blocks that may be evicted, by last use (the index's clock, microseconds)
-- KEYS[2]  held    zset   leased blocks, which may not be evicted, by last use
-- KEYS[3]  sizes   hash   bytes of each block of both
-- KEYS[4]  leases  hash   for each leased block: its owners and when each one's lease ends (ms), as JSON
-- KEYS[5]  ends    zset   leased blocks by when the last of their leases ends (ms)
-- KEYS[6]  state   hash   sum: bytes of all blocks; held: of the leased ones; clock: the latest use; budget, keep: as set
-- ARGV[1]  budget in bytes, 0: as set last
-- ARGV[2]  keep in ms, 0: as set last
--
-- An index that lost a part (by eviction, expiry or tampering) is deleted and built anew: blocks are added again as they
-- are used, and the others expire.

local USED, HELD, SIZES, LEASES, ENDS, STATE = unpack(KEYS)
local AT_ONCE = 64  -- of what is swept in one call

local function counted()
  local leased = redis.call('ZCARD', HELD)
  local all = redis.call('ZCARD', USED) + leased
  local bytes = tonumber(redis.call('HGET', STATE, 'sum') or 0)
  return redis.call('HLEN', SIZES) == all and redis.call('HLEN', LEASES) == leased and redis.call('ZCARD', ENDS) == leased
    and (all > 0) == (bytes > 0)  -- all but the state may go at once, or the state alone
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

-- The next moment of the index's clock: no two uses have the same.
local function tick()
  clock = clock + 1
  return clock
end

-- A block's leases are over.
local function free(key)
  local score = redis.call('ZSCORE', HELD, key)
  if not score then return end
  redis.call('ZREM', HELD, key)
  redis.call('ZREM', ENDS, key)
  redis.call('HDEL', LEASES, key)
  redis.call('ZADD', USED, score, key)
  held = held - size_of(key)
end

-- A block is out of the index; 1 if it was in it.
local function drop(key)
  free(key)
  sum = sum - size_of(key)
  redis.call('HDEL', SIZES, key)
  return redis.call('ZREM', USED, key)
end

-- Leases that ran out, some at a time; how many.
local function settle()
  local over = redis.call('ZRANGE', ENDS, '-inf', now, 'BYSCORE', 'LIMIT', 0, AT_ONCE)
  for _, key in ipairs(over) do free(key) end
  return #over
end

-- Blocks that nobody used for longer than they are kept, some at a time: the server has forgotten them, or should.
local function age()
  if keep == 0 then return {} end
  local old = redis.call('ZRANGE', USED, '-inf', (now - keep) * 1000, 'BYSCORE', 'LIMIT', 0, AT_ONCE)
  for _, key in ipairs(old) do drop(key) end
  return old
end

-- Last in every script that changes something: the index lives as long as what is in it.
local function save()
  redis.call('HSET', STATE, 'sum', sum, 'held', held, 'clock', clock, 'budget', budget, 'keep', keep)
  local last = redis.call('ZRANGE', ENDS, 0, 0, 'REV', 'WITHSCORES')
  local ttl = math.max(2 * keep, last[2] and tonumber(last[2]) - now + keep or 0, 60000)
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < ttl - math.min(ttl / 10, 10000) then redis.call('PEXPIRE', key, ttl) end
  end
end
