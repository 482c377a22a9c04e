"""Records of each rank's last operations, kept outside of its process and read when a job has died."""
