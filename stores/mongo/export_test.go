package mongostore

// CheckIndexesAlways makes every Acquire look for the indexes.
func (s *Store) CheckIndexesAlways() { s.indexed.again = 0 }
