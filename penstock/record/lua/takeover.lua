-- A worker goes on with a request whose holder died: its lease ran out. It needs no delivery: the message is here.
--
-- KEYS[1]  record   hash
-- KEYS[2]  log      stream
-- ARGV     stage, owner, lease in ms, keep of a pending record in ms
--
-- Replies  {'claim', epoch, tokens, hash, 0, cancelled, attempts, message}
--          {'busy', ms}   it is held, for that long at most
--          {'gone'}       there is nothing to take over: it ended, was handed off or given back, or is of another stage
--
-- Crash    before: nothing happened. After: the lease runs out, and the next one takes it over.
--
-- What makes this safe: the epoch moves on, so the old holder is refused; and who takes over settles nothing, so it
-- does not matter whether the delivery is at this moment on its way to somebody.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'lease', 'stage', 'tokens', 'hash', 'attempts', 'cancelled', 'message')
local lease, message = tonumber(r[2] or 0), r[8] or ''
if r[3] ~= ARGV[1] or lease == 0 or message == '' then return {'gone'} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if lease > now then return {'busy', lease - now} end

local epoch, attempts = math.max(tonumber(r[1]) + 1, now), tonumber(r[6] or 0) + 1
redis.call('HSET', KEYS[1], 'epoch', epoch, 'owner', ARGV[2], 'lease', now + ARGV[3], 'attempts', attempts)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return {'claim', epoch, tonumber(r[4]), r[5], 0, r[7] and 1 or 0, attempts, message}
