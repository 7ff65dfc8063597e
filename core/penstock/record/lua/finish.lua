-- Append the end of a stream to the log, publish it to live readers, and end the claim.
--
-- KEYS[1]  record   hash
-- KEYS[2]  log      stream; the end after n tokens is the entry `n-2`
-- ARGV     live channel, epoch, n, event as JSON, ttl of an ended stream in ms, id, format of `held` keys, the name of
--          the request's own message if the worker holds its delivery, else '', format of `ended` keys, days for which
--          ids are remembered (see ended.lua)
--
-- Replies  1 ended, now or before by this epoch; 0 fenced: the epoch is another one, n is not the number of tokens,
--          another message is bound, or the log is gone; 3 ended, but the log's key holds a value that is not a log
--
-- Crash    before: the next worker that claims the request continues it. After: that worker finds the end and only
--          settles.
--
-- A worker that holds the claim and the delivery of the request's own message settles the result with that delivery:
-- the message is bound here, and no other message settles the result later. Without that delivery, the first job that
-- is claimed after the end is bound (`claim.lua`).

local r, name = redis.call('HMGET', KEYS[1], 'epoch', 'tokens', 'stage', 'session', 'bound', 'body'), ARGV[8]
if r[1] ~= ARGV[2] or r[2] ~= ARGV[3] then return 0 end
if name ~= '' and (r[5] or '') ~= '' and r[5] ~= name then return 0 end
if r[3] == 'end' then
  if name ~= '' then redis.call('HSET', KEYS[1], 'bound', name) end
  return 1
end

local added = ARGV[3] == '0' and redis.pcall('XADD', KEYS[2], '0-2', 'e', ARGV[4])
  or redis.pcall('XADD', KEYS[2], 'NOMKSTREAM', ARGV[3] .. '-2', 'e', ARGV[4])
if not added then return 0 end  -- the log lost its tokens: the next claim starts from the beginning
local is_refused = type(added) == 'table'
-- If Redis refuses every write (OOM, MISCONF, a missing right, …), nothing was written, and the worker tries again.
local is_no_log = is_refused and (string.find(added.err, '^WRONGTYPE') or string.find(added.err, '^ERR'))
if is_refused and (not is_no_log or string.find(added.err, '^ERR ACL')) then return added end
if (r[4] or '') ~= '' then redis.call('SREM', string.format(ARGV[7], r[4]), ARGV[6]) end
redis.call('HSET', KEYS[1], 'stage', 'end', 'session', '', 'message', '')
if name ~= '' then redis.call('HSET', KEYS[1], 'bound', name) end
remember_end(ARGV[9], tonumber(ARGV[10]), ARGV[6], name ~= '' and name or r[5] or '', r[6] or '')
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
if is_refused then return 3 end
redis.call('PUBLISH', ARGV[1], ARGV[4])
return 1
