"""The `file_mounts` of jobs: symbolic links, copies of buckets, mounted buckets, write-back directories."""
