-- The table of records, and the memory of which version of it exists. May run twice; `semel migrate`
-- runs the same.
-- Runs on MySQL 8 and MariaDB 10.6 or newer: of the comments with an exclamation mark each is read
-- by one of them alone, and asks for the collation that compares every character, also the last.
-- For a table of another name exchange idempotent_record everywhere.

CREATE TABLE IF NOT EXISTS semel_schema (
    table_name VARCHAR(64) NOT NULL PRIMARY KEY,
    version INT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;

CREATE TABLE IF NOT EXISTS `idempotent_record` (
    -- The judge of identity: a digest of prefix, scope and key. A text would be compared by a
    -- collation, and most of those take Abc, abc and 'abc ' for the same.
    digest BINARY(16) NOT NULL PRIMARY KEY,
    prefix VARCHAR(128)
        CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */ NOT NULL,
    idem_key VARCHAR(255)
        CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */ NOT NULL,
    biz_type VARCHAR(255)
        CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */ NOT NULL,
    payload_hash VARBINARY(64),
    -- 0 processing, 1 succeeded, 2 failed
    status TINYINT NOT NULL,
    result_payload LONGBLOB,
    -- All times are UTC. expire_at is set when the operation has ended, lease_until while it runs.
    expire_at DATETIME(6),
    created_at DATETIME(6) NOT NULL,
    updated_at DATETIME(6) NOT NULL,
    codec VARCHAR(255) CHARACTER SET utf8mb4,
    retryable TINYINT NOT NULL DEFAULT 0,
    owner VARBINARY(64) NOT NULL,
    number BIGINT NOT NULL,
    fence BIGINT NOT NULL,
    hold TINYINT NOT NULL,
    lease_until DATETIME(6),
    superseded VARBINARY(1024),
    format INT NOT NULL,
    UNIQUE KEY identity (idem_key, biz_type, prefix),
    -- What is stuck, and what may be purged. One for both, since every end of an operation moves
    -- a record in it: what runs has a lease, and what has ended has none and expires.
    KEY due (prefix, lease_until, expire_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

INSERT INTO semel_schema (table_name, version) VALUES ('idempotent_record', 1)
    ON DUPLICATE KEY UPDATE version = GREATEST(version, 1);
