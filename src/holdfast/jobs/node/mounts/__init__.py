"""The `file_mounts` of jobs: links, copies of buckets, mounted buckets, write-back directories."""
