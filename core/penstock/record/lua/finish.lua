-- The end of a stream: into the log and to the live readers; the request is nobody's from now on.
--
-- KEYS[1]  record   hash
-- KEYS[2]  log      stream; the end after n tokens is the entry `n-2`
-- ARGV     live channel, epoch, n, event as JSON, keep of an ended stream in ms, id, what `held` keys look like, the name
--          of the request's own message where the holder has its delivery, or ''
--
-- Replies  1 ended (now, or before by this epoch), 0 fenced: another epoch, n is not the number of tokens, another message
--          is bound, or the log is gone, 3 ended, but what is there in place of a log takes no end
--
-- Crash    before: the next holder goes on. After: the next holder sees the end and only settles.
--
-- Who holds the request, and has its own message's delivery, settles the result with that: no other message does from
-- now on. Where nobody has it, the first job that comes behind the end is bound (`claim.lua`).

local r, name = redis.call('HMGET', KEYS[1], 'epoch', 'tokens', 'stage', 'session', 'bound'), ARGV[8]
if r[1] ~= ARGV[2] or r[2] ~= ARGV[3] then return 0 end
if name ~= '' and (r[5] or '') ~= '' and r[5] ~= name then return 0 end
if r[3] == 'end' then
  if name ~= '' then redis.call('HSET', KEYS[1], 'bound', name) end
  return 1
end

local added = ARGV[3] == '0' and redis.pcall('XADD', KEYS[2], '0-2', 'e', ARGV[4])
  or redis.pcall('XADD', KEYS[2], 'NOMKSTREAM', ARGV[3] .. '-2', 'e', ARGV[4])
if not added then return 0 end  -- its tokens are gone: the next claim begins anew
local is_refused = type(added) == 'table'
-- Where no log would take an end (OOM, MISCONF, a right is missing, …), nothing was written, and the worker tries again.
local is_no_log = is_refused and (string.find(added.err, '^WRONGTYPE') or string.find(added.err, '^ERR'))
if is_refused and (not is_no_log or string.find(added.err, '^ERR ACL')) then return added end
if (r[4] or '') ~= '' then redis.call('SREM', string.format(ARGV[7], r[4]), ARGV[6]) end
redis.call('HSET', KEYS[1], 'stage', 'end', 'session', '', 'message', '')
if name ~= '' then redis.call('HSET', KEYS[1], 'bound', name) end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
if is_refused then return 3 end
redis.call('PUBLISH', ARGV[1], ARGV[4])
return 1
