"""A torch-native CPU platform for stock SGLang."""
