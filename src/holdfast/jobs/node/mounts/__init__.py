"""The `file_mounts` of local jobs: links, copies of buckets, mounted buckets, write-back directories."""
