"""What others did to CPUs of this machine: pins and writes that are not ours."""
