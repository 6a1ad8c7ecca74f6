"""The trainings: settings, plans or loops, reports. Import the module you need."""
