"""The trainings: settings, plans or training loops, and reports. Import the module you need."""
