-- End a request that a peer answers which has adopted this region. No message settles it here any more.
--
-- KEYS[1]  record  hash
-- KEYS[2]  log     stream
-- ARGV     id, the name to bind (no message has it), end event as JSON after 0 tokens, ttl in ms, format of `held` keys,
--          hash before the first token
--
-- Replies  1 ended here: the claim of a worker that has the request is over, all messages of it are stale from now on.
--          Live readers find the end in the log after a silence, because gateways may not publish;
--          0 it was given away before; 2 it had ended here by itself, and is answered in both regions
--
-- Crash    before: nothing has changed. After: the caller asks again, and gets 0.
--
-- This is the one place where a binding changes: a job that was bound before is stale, as any message of the request.

local id, name = ARGV[1], ARGV[2]
local r = redis.call('HMGET', KEYS[1], 'epoch', 'session', 'stage', 'bound', 'tokens', 'hash')
if r[4] == name then return 0 end
local tokens, hash, has_end = read_log_end(KEYS[2], tonumber(r[5] or 0), r[6] or ARGV[6], ARGV[6])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if (r[2] or '') ~= '' then redis.call('SREM', string.format(ARGV[5], r[2]), id) end
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', math.max(tonumber(r[1] or 0) + 1, now)), 'stage', 'end',
  'session', '', 'message', '', 'bound', name, 'tokens', tokens, 'hash', hash)
if not has_end then
  local ending = string.gsub(ARGV[3], '"completion_tokens":0', string.format('"completion_tokens":%d', tokens), 1)
  redis.call('XADD', KEYS[2], string.format('%d-2', tokens), 'e', ending)
end
for i = 1, 2 do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
return has_end and 2 or 1
