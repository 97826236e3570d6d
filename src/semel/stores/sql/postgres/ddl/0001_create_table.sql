-- The table of idempotency records, for PostgreSQL 12 or newer. `semel migrate` runs the same.
--
-- Another table name:  exchange the word idempotent_record, everywhere.
-- Another schema:      SET search_path TO that_schema; first.
-- Hash partitions:     let PARTITION BY HASH out of its comment, write INDEX for UNIQUE INDEX, and
--                      create the partitions, here 8 of them:
--                      CREATE TABLE idempotent_record_p0 PARTITION OF idempotent_record
--                          FOR VALUES WITH (MODULUS 8, REMAINDER 0);    and so on to p7
-- Own columns:         add them; they must have a default or allow NULL, because not every row is
--                      written by a claim.
--
-- The role that the application uses needs no more than this:
--     GRANT SELECT, INSERT, UPDATE, DELETE ON idempotent_record TO the_role;
--     GRANT SELECT ON semel_schema TO the_role;

CREATE TABLE idempotent_record (
    digest uuid PRIMARY KEY,                    -- 128 bits of sha256 over prefix, biz_type, idem_key
    prefix text COLLATE "C" NOT NULL,           -- stores with different prefixes never meet
    idem_key text COLLATE "C" NOT NULL,
    biz_type text COLLATE "C" NOT NULL,         -- the scope
    payload_hash bytea,
    status smallint NOT NULL,                   -- 0 processing, 1 succeeded, 2 failed
    result_payload bytea,
    expire_at timestamptz,                      -- set when the operation has ended
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    codec text,                                 -- what wrote result_payload
    retryable boolean NOT NULL,
    owner bytea NOT NULL,                       -- the attempt
    number integer NOT NULL,                    -- counts the attempts
    fence bigint NOT NULL,
    hold boolean NOT NULL,
    lease_until timestamptz,                    -- set while processing; past = abandoned
    superseded bytea[] NOT NULL,                -- replaced payload hashes
    takeover boolean NOT NULL,                  -- the attempt replaced an abandoned one
    waited_for boolean NOT NULL,                -- its end is told by NOTIFY semel_wakeup
    format smallint NOT NULL
) /* PARTITION BY HASH (digest) */;

CREATE UNIQUE INDEX idempotent_record_key ON idempotent_record (idem_key, biz_type, prefix);

-- What is stuck, and what may be purged: both are found without reading anything else.
CREATE INDEX idempotent_record_lease ON idempotent_record (prefix, lease_until)
    WHERE status = 0;
CREATE INDEX idempotent_record_expiry ON idempotent_record (prefix, expire_at)
    WHERE expire_at IS NOT NULL;

CREATE TABLE IF NOT EXISTS semel_schema (
    table_name text PRIMARY KEY,
    version integer NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);

INSERT INTO semel_schema (table_name, version) VALUES ('idempotent_record', 1);
