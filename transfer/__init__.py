"""What an encoder is worth: encoders from anywhere (pretrained), k-NN and probes of frozen ones (knn, probe), tuning
with labels (recipes, labelled, finetuning), and finding objects (detection)."""
