from cogumi.cli import main

main()
