"""Does a run fit the card, the disk and the budget? Said before anything is downloaded."""
