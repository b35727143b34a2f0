from benchmarks.gpu.programme import main

main()
